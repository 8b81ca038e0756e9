"""Compare the training steps of a hand-written loop, Slipstream and other frameworks, each in its own process."""

from slipstream.compare.contenders import CONTENDERS, Contender, Work
from slipstream.compare.measure import Comparison, Entry, compare
from slipstream.compare.subject import Subject, config_subject, network_subject

__all__ = [
    "CONTENDERS",
    "Comparison",
    "Contender",
    "Entry",
    "Subject",
    "Work",
    "compare",
    "config_subject",
    "network_subject",
]
