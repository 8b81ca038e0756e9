"""The recipes that come with the package: YAML files in the Runner's words, or composed by Hydra."""

from slipstream.recipes.compose import compose
from slipstream.recipes.find import find_recipe, is_composed, recipes

__all__ = ["compose", "find_recipe", "is_composed", "recipes"]
