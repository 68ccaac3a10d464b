"""Tests of what deploys kvpressure: chart, manifests, scrape examples, image."""
