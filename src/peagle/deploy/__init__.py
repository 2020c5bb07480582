"""Deployment on managed platforms: Amazon SageMaker, and the catalog of models with heads."""
