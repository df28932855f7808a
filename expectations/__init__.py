"""The contracts: study file, protocol, tables and columns, each declared once, and the checks derived from them."""
