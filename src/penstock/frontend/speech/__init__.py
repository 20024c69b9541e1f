"""Speech-to-text: audio decoding, log-mel features, and transcription."""
