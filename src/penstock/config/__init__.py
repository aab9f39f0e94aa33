"""Configuration: frozen structs (``schema``), the one reader of flags, files and environment (``load``), and the one
place where every "auto" is decided (``resolve``)."""
