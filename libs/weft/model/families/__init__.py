"""Model families, one file each: functions that read config.json into a ModelConfig. No torch.

Each raises BadCheckpoint for what is not supported. `weft.model.config.FAMILIES` names them by architecture.
"""
