"""One pytest session: settings, fixtures, what the tests gave, and the end of the run."""
