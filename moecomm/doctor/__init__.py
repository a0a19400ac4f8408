"""Looks at a machine: what is here, what is missing, and the one command that helps.

One module per thing looked at: ``probe`` collects facts (its sources can be replaced, so that
tests can play any machine), ``findings`` turns facts into lines. ``transports`` concludes which
transports can be used.
"""

from moecomm.doctor.finding import Finding, State
from moecomm.doctor.report import Report, examine
from moecomm.doctor.transports import Verdict

__all__ = ["Finding", "Report", "State", "Verdict", "examine"]
