"""Parts that all other folders use, and that do not know programs."""
