"""The documentation site: pages and figures that are made when it is built, with mkdocs.yml in the root."""
