from rankwatch_service.cli import main

main()
