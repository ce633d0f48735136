"""What published papers report, repeated: Echo's, Dymem's, FreeLunch's and OLLA's numbers beside those of this project."""
