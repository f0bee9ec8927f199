"""What the suites hold parts against: definitions written out in float64, and the step data that they are tried on."""
