"""3. Launch: start the workers of a plan and watch over them."""
