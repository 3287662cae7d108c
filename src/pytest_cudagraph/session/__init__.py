"""What the plugin does inside of a pytest session."""
