"""undrift: federated learning that stays on course."""
