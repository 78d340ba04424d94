# For pyright only: the folder of Gluon.
