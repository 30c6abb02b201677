"""Each service against fakes of its peers."""
