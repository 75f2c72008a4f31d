"""Extreme classification (paper, section 3.4, Table 4): many labels, and attention that picks."""
