"""What the exporter is made of: a bill of materials, the licences of its dependencies, and known vulnerabilities."""
