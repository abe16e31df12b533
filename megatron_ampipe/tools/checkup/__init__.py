"""What ``ampipe doctor`` looks at: packages, environment, whether ranks agree, whether overlap happens."""
