from npbml.cli import main

main()
