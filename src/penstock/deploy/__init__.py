"""Deployments of a fleet file by others: Kubernetes, Helm, systemd and Compose.  Pure: text and values only."""
