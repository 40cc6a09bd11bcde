"""A decoder trained on packed documents, on one device or a mesh: see README.md."""
