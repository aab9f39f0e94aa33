"""Scenarios that run in the environments of client packages, and what makes those environments."""
