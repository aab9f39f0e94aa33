"""Arithmetic: one signature an operation (``ops``), one slow oracle (``reference``), one fast backend a device."""
