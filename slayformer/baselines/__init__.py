"""Mechanisms to compare with: each module is one options class and one feature map or kernel."""
