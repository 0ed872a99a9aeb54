"""Parameter servers: they hold the weights and run the loop; workers take tickets, and send gradients for them."""
