"""The graphs that a program captures itself: what they hold, how often they replay, and whether they are right."""
