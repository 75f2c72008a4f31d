"""The paper's tables and figures, each computed by the project's own code."""
