"""Sounds of transcriptions: read (wav.py), brought to the model's rate (resampling.py), cut into windows (windows.py),
and made into what the model hears (features.py)."""
