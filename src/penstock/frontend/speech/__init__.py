"""Speech: audio files to log-mel features."""
