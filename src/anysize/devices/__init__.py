"""Budgets, kinds of devices, and fleets of them."""
