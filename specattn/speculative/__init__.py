"""The algorithm: propose, build the tree, verify, accept, commit, extend."""
