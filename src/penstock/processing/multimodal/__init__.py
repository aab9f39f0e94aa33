"""Images and audio to what a model reads: fetching, decoding, resizing, log-mel features, all within bounds."""
