"""How blocks are chosen: an estimator guesses each block's attention mass, a rule turns the guesses into a list."""

from .estimators import Estimator, make_estimator
from .maxima import Maxima, PseudoMaximum
from .rules import Rule, make_rule

__all__ = ["Estimator", "Maxima", "PseudoMaximum", "Rule", "make_estimator", "make_rule"]
