"""prefix-proxy: sends each chat request in the form whose prefix vLLM has cached.  This is the map of the package.

A request comes in through `downstream`, becomes values, is rewritten by `core`, goes out through `upstream`, and its
answer comes back as bytes.  README.md beside this file tells the life of a request.

    app            composition root: builds the state, adds the routes, closes everything in reverse
    state          the app's typed state, and the keys of what one request carries
    downstream/    what faces clients: chat and relay, passthrough, models, websocket, status, admin; middlewares, auth
    rewriting      the seam between shell and core: what is sent in place of what was received
    facts, memory  its two halves: what is looked up for a request; what is remembered of an exchange
    flight         which requests share a run of vLLM and whose place one takes; holding: tasks that wait for their chat
    rates          what a key or user may ask a minute; admission: how many requests are at vLLM at once
    core/          pure: request, identity, pipeline with one file a step, ledger, splice, sse, meter, reject
    sessions       the table of live sessions, over the store
    explaining     what a prompt should reuse of the last one, what it did, and why; last_texts: where two texts part
    recorder       requests written into files, redacted, for `explain`; offline plays them through the rewriting
    learning       lines that proved volatile, beyond one chat
    store/         one SQLite file: the queue before it, the writer, migrations, what is done when the file fails
    upstream/      what faces vLLM: connections, headers, models and health, the template probe
    chat_template  templates as files: ours, and how vLLM renders one; template_verdicts judges
    overview       what the status page shows of one moment
    config/        every setting, declared once; flags, environment, TOML
    metrics, logs  every metric, label and bucket; collectors; log lines without any text of users
    aio            the only module that creates tasks
    secret         what salts and the delimiters of notes are made from
    commands/      the command line, one module a command
    bench/         chats as Open WebUI tells them, for the command of that name alone
    doctor/        what is looked at in a running vLLM, its flags and Open WebUI, and what is made of it
    starting, own_template, child, upkeep   for `up`: vLLM's command line, its template, its process, its restarts
    demo/          a real vLLM on the CPU and a chat with it; nothing of the proxy imports it but its command

Who may import whom.  Arrows point inwards; tests/test_house_rules.py holds the first rule.

    core           imports core, and nothing that waits, reads a clock, throws dice, logs or reaches out
    config, aio    import nothing of the package but themselves
    store          imports aio; learning imports store
    upstream       imports aio, config, core and metrics
    metrics, logs, secret   import config
    rates, admission   import config, core and metrics; rates also who calls (downstream.auth)
    sessions       imports config, core, metrics and store
    chat_template  imports core
    state          names the types of all that it holds, and is imported by what uses them
    rewriting, facts, memory   import config, core, sessions and state, and of downstream who calls (auth, signed)
    holding        imports config, core and coalesce_metrics; flight also aio, rewriting and downstream.answers
    downstream     imports all of the above; never app or commands
    app            imports all of the above
    doctor         imports config, core, template_verdicts and upstream
    commands       import app, config, chat_template, downstream, store, upstream, bench, demo, doctor and what `up`
                   needs; with demo the only ones that print
"""
