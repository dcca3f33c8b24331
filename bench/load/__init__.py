"""An engine under load, as a service's user feels it: requests that arrive and leave."""
