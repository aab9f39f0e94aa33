"""Deployments of a fleet file by others: documents for Kubernetes, systemd and Compose.  Pure: text and values only."""
