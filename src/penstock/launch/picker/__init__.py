"""An endpoint picker: the gateway that a proxy in front of many gateways should send each request to."""
