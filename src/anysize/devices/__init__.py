"""Budgets, device groups and fleets."""
