"""The scheduler, bottom up: policy, bookings, fleet, affinity, service."""
