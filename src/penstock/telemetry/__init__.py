"""What the service tells about itself: metrics, log lines."""
