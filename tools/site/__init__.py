"""The documents as a site with search: ``make docs-site``."""
