"""Built-in recipes: YAML files in the Runner's syntax, or in SuperGradients syntax, which Hydra composes."""

from slipstream.recipes.compose import compose
from slipstream.recipes.find import find_recipe, is_composed, recipes

__all__ = ["compose", "find_recipe", "is_composed", "recipes"]
