"""Lightning Fabric (lightning_memopt/fabric) on one device and on several, and Lightning under its other names."""
