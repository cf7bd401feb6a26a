"""prefix-proxy: sends each chat request in the form whose prefix vLLM has cached.  This is the map of the package.

A request comes in through `downstream`, becomes values, is rewritten by `core`, goes out through `upstream`, and its
answer comes back as bytes.  README.md beside this file tells the life of a request.

    app            composition root: builds the state, adds the routes, closes everything in reverse
    state          the app's typed state, and the keys of what one request carries
    downstream/    what faces clients: chat and relay, passthrough, models, admin, health; middlewares, auth, body, CORS
    rewriting      the seam between shell and core: gathers facts, runs the pipeline, remembers what went up
    core/          pure: request, identity, pipeline with one file a step, ledger, splice, sse, meter, reject
    sessions       the table of live sessions, over the store
    store/         one SQLite file: the queue before it, the writer, migrations, what is done when the file fails
    upstream/      what faces vLLM: connections, headers, models and health, the template probe
    config/        every setting, declared once; flags, environment, TOML
    metrics, logs  every metric, label and bucket; log lines without any text of users
    aio            the only module that creates tasks
    secret         what salts and the delimiters of notes are made from
    commands/      the command line, one module a command
    demo/          a real vLLM on the CPU and a chat with it; nothing of the proxy imports it but its command

Who may import whom.  Arrows point inwards; tests/test_house_rules.py holds the first rule.

    core           imports core, and nothing that waits, reads a clock, throws dice, logs or reaches out
    config, aio    import nothing of the package but themselves
    store          imports aio
    upstream       imports aio, config and core
    metrics, logs, secret   import config
    sessions       imports config, core, metrics and store
    state          names the types of all that it holds, and is imported by what uses them
    rewriting      imports config, core, sessions and state, and of downstream only who calls (auth, signed)
    downstream     imports all of the above; never app or commands
    app            imports all of the above
    commands       import app, config, downstream, store and demo; with demo the only ones that print
"""
