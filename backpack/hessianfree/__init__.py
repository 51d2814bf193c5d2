"""Products with Jacobians, Hessians and GGNs by automatic differentiation alone."""
