"""What several tests share, by subject."""
