//! Tests of `config`.

use super::*;
use proptest::prelude::*;

fn around() -> Surroundings {
    Surroundings { runtime_dir: Some("/run/user/7".into()), cores: 6, socket_passed: false, control_passed: false }
}

fn resolve(toml: &str) -> Result<Settings, ConfigError> {
    Config::from_toml(toml).unwrap().resolve(&Origins::new(), &around())
}

/// Settings from `model = ...` and these lines.
fn with(lines: &str) -> Result<Settings, String> {
    resolve(&format!("model = \"/m.gguf\"\n{lines}")).map_err(|e| e.to_string())
}

#[test]
fn without_anything_written_the_defaults_hold() {
    let settings = with("").unwrap();
    assert_eq!(settings.socket.as_deref(), Some(Path::new("/run/user/7/llmd/llmd.sock")));
    assert_eq!(settings.control.as_deref(), Some(Path::new("/run/user/7/llmd/control.sock")));
    assert_eq!((settings.device, settings.threads, settings.isa), (Device::Cpu, 6, Isa::Auto));
    assert_eq!((settings.activations, settings.kv_type, settings.kv), (Activations::Int8, KvType::Bf16, KvSize::Auto));
    assert_eq!((settings.sequences_max, settings.tokens_per_step, settings.prefill_chunk_max), (64, 512, 256));
    assert_eq!((settings.metrics, settings.step_log), (None, None));
    assert_eq!(settings.drain_timeout, Duration::from_secs(30));
    assert!(settings.prefix_cache && !settings.lock_memory);
}

#[test]
fn a_model_is_required_and_the_error_says_how() {
    let error = resolve("").unwrap_err().to_string();
    assert!(error.contains("--model PATH") && error.contains("LLMD_MODEL"), "{error}");
}

/// One wrong value for every key: the error names key, value and what is allowed.
#[test]
fn every_bound_is_checked_and_named() {
    let cases = [
        ("model", "\"\"", "GGUF"),
        ("socket", "\"\"", "1 to 107 bytes"),
        ("control", "\"\"", "1 to 107 bytes"),
        ("device", "\"tpu\"", "auto or cpu"),
        ("threads", "0", "auto, or a whole number from 1 to 1024"),
        ("threads", "\"many\"", "from 1 to 1024"),
        ("isa", "\"sve\"", "auto, avx512, avx-vnni, avx2, neon-i8mm, neon-dotprod, neon, portable"),
        ("activations", "\"f16\"", "int8, int16, f32"),
        ("kv_type", "\"int4\"", "bf16, f16, int8, f32"),
        ("kv_blocks", "0", "from 1 to 268435455"),
        ("kv_blocks", "268435456", "from 1 to 268435455"),
        ("kv_memory", "\"1000KiB\"", "1MiB to 64TiB"),
        ("kv_memory", "\"65TiB\"", "1MiB to 64TiB"),
        ("kv_memory", "\"99999999999999999999GiB\"", "1MiB to 64TiB"),
        ("sequences_max", "0", "from 1 to 4096"),
        ("sequences_max", "4097", "from 1 to 4096"),
        ("waiting_max", "-1", "from 0 to 1048576"),
        ("tokens_per_step", "79", "from 80 to 65536"),
        ("prefill_chunk_max", "513", "from 16 to 512"),
        ("prefill_chunk_max", "0", "from 16 to 512"),
        ("prefill_chunk_max", "100", "a multiple of 16"),
        ("prefix_cache", "\"yes\"", "true, false"),
        ("lock_memory", "\"yes\"", "true, false"),
        ("scheduler", "\"fifo\"", "continuous, static"),
        ("sessions_max", "1025", "from 1 to 1024"),
        ("sessions_per_uid", "257", "from 1 to 256"),
        ("requests_per_session", "257", "from 1 to 256"),
        ("metrics", "\"localhost\"", "127.0.0.1:9400"),
        ("metrics", "\"unix:\"", "1 to 107 bytes"),
        ("drain_timeout", "86401", "from 0 to 86400"),
        ("log_level", "\"loud\"", "off, error, warn, info, debug, trace"),
        ("step_log", "\"\"", "a path"),
    ];
    for (key, value, allowed) in cases {
        let model = if key == "model" { "" } else { "model = \"/m.gguf\"\n" };
        let error = resolve(&format!("{model}{key} = {value}")).expect_err(key).to_string();
        assert!(error.starts_with(&format!("{key} = ")), "{error}");
        assert!(error.contains(value.trim_matches('"')) && error.contains(allowed), "{error}");
    }
    for (key, _) in Config::default().written() {
        assert!(cases.iter().any(|(tested, _, _)| *tested == key), "no wrong value is tried for {key}");
    }
}

/// This room may not use the protocol, so its bounds are written again; here they are compared.
#[test]
fn bounds_are_those_of_the_protocol() {
    use llmd_protocol::{control, limits};
    assert_eq!(*SESSIONS.end(), limits::SESSIONS_MAX as u64);
    assert_eq!(*SESSIONS_PER_UID.end(), limits::SESSIONS_PER_UID_MAX as u64);
    assert_eq!(*REQUESTS_PER_SESSION.end(), u64::from(limits::REQUESTS_IN_FLIGHT));
    const { assert!(limits::SESSIONS_MAX <= control::CLIENTS_LISTED_MAX) };
}

#[test]
fn keys_that_contradict_each_other_are_refused() {
    assert!(with("kv_blocks = 8\nkv_memory = \"2GiB\"").unwrap_err().contains("not both"));
    let same = with("socket = \"/tmp/a\"\ncontrol = \"/tmp/a\"").unwrap_err();
    assert!(same.contains("other than the one of socket"), "{same}");
    let long = format!("socket = \"/{}\"", "x".repeat(SOCKET_PATH_BYTES_MAX));
    assert!(with(&long).unwrap_err().contains("1 to 107 bytes"));
}

#[test]
fn defaults_give_way_to_what_is_written() {
    let settings = with("sequences_max = 1000\nsessions_max = 4").unwrap();
    assert_eq!((settings.tokens_per_step, settings.sessions_per_uid), (1143, 4));
    assert_eq!(with("sequences_max = 8\ntokens_per_step = 24").unwrap().prefill_chunk_max, 16);
}

#[test]
fn sizes_are_read_with_units() {
    for (text, bytes) in
        [("\"2GiB\"", 2 << 30), ("\"512 MiB\"", 512 << 20), ("1048576", 1 << 20), ("\"3GB\"", 3_000_000_000)]
    {
        assert_eq!(with(&format!("kv_memory = {text}")).unwrap().kv, KvSize::Bytes(bytes), "{text}");
    }
    assert_eq!(with("kv_memory = \"auto\"").unwrap().kv, KvSize::Auto);
    assert!(with("kv_memory = \"2 gigs\"").is_err());
}

#[test]
fn a_device_that_is_not_built_in_is_its_own_error() {
    let config = Config::from_toml("model = \"/m\"\ndevice = \"cuda\"").unwrap();
    let error = config.resolve(&Origins::new(), &around()).unwrap_err();
    assert!(matches!(error, ConfigError::DeviceNotBuiltIn { .. }), "{error}");
}

#[test]
fn an_unknown_key_in_a_file_is_refused_with_its_line() {
    let error = Config::from_toml("model = \"/m\"\nkv_blokcs = 3\n").unwrap_err();
    assert_eq!(error, "line 2: unknown key `kv_blokcs`; `llmd --help` lists the keys");
    assert!(Config::from_toml("threads = [1]").is_err());
    assert!(Config::from_toml("threads = 1.5").is_err());
}

#[test]
fn sockets_that_systemd_passes_need_no_path() {
    let nowhere = Surroundings { runtime_dir: None, ..around() };
    let config = Config { model: Some("/m".into()), ..Config::default() };
    let error = config.resolve(&Origins::new(), &nowhere).unwrap_err().to_string();
    assert!(error.contains("XDG_RUNTIME_DIR") && error.contains("--socket"), "{error}");
    let passed = Surroundings { socket_passed: true, ..nowhere.clone() };
    let settings = config.resolve(&Origins::new(), &passed).unwrap();
    assert_eq!((settings.socket, settings.control), (None, None));
    let written = Config { socket: Some("/a/b.sock".into()), ..config };
    let settings = written.resolve(&Origins::new(), &nowhere).unwrap();
    assert_eq!(settings.control.as_deref(), Some(Path::new("/a/control.sock")));
    assert_eq!(settings.metrics, None);
}

#[test]
fn addresses_of_metrics() {
    assert_eq!(with("metrics = \"off\"").unwrap().metrics, None);
    let tcp = with("metrics = \"127.0.0.1:9400\"").unwrap().metrics;
    assert_eq!(tcp, Some(MetricsAddress::Tcp("127.0.0.1:9400".parse().unwrap())));
    let unix = with("metrics = \"unix:/run/m.sock\"").unwrap().metrics;
    assert_eq!(unix, Some(MetricsAddress::Unix("/run/m.sock".into())));
}

#[test]
fn flags_win_over_the_file_and_errors_name_the_origin() {
    let path = std::env::temp_dir().join(format!("llmd-config-test-{}.toml", std::process::id()));
    std::fs::write(&path, "model = \"/file.gguf\"\nthreads = 3\nwaiting_max = -5\n").unwrap();
    let line = ["llmd", "--config", path.to_str().unwrap(), "--threads", "5", "--print-config"];
    let told = told(line.map(str::to_owned)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(told.print_config);
    assert_eq!(told.config.threads, Some("5".into()));
    assert_eq!(told.config.model, Some("/file.gguf".into()));
    assert_eq!(told.origins["threads"], "--threads");
    let error = told.config.resolve(&told.origins, &around()).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()) && error.contains("\"-5\""), "{error}");
}

/// The environment is process-wide, so it is tried in a process of its own: this test runs itself again.
#[test]
fn the_environment_stands_between_file_and_flags() {
    const INNER: &str = "LLMD_TEST_INNER_CONFIG";
    if std::env::var_os(INNER).is_some() {
        let line = ["llmd", "--threads", "9"];
        let told = told(line.map(str::to_owned)).unwrap();
        assert_eq!(told.config.threads, Some("9".into()));
        assert_eq!(told.config.kv_blocks, Some("77".into()));
        assert_eq!(told.origins["kv_blocks"], "LLMD_KV_BLOCKS");
        assert_eq!(told.config.sequences_max, Some("4".into()), "from the file");
        return;
    }
    let path = std::env::temp_dir().join(format!("llmd-config-env-{}.toml", std::process::id()));
    std::fs::write(&path, "kv_blocks = 5\nsequences_max = 4\n").unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "config::tests::the_environment_stands_between_file_and_flags"])
        .env(INNER, "1")
        .env("LLMD_CONFIG", &path)
        .env("LLMD_THREADS", "2")
        .env("LLMD_KV_BLOCKS", "77")
        .output()
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let output = String::from_utf8_lossy(&status.stdout);
    assert!(status.status.success() && output.contains("1 passed"), "{output}");
}

#[test]
fn a_missing_or_huge_file_is_an_error() {
    let load = |path: &str| told(["llmd", "--config", path].map(str::to_owned)).unwrap_err().to_string();
    assert!(load("/nonexistent/llmd.toml").contains("/nonexistent/llmd.toml"));
    assert!(load("/dev/zero").contains("longer than 1048576 bytes"));
}

#[test]
fn the_example_parses_and_names_every_key() {
    let example = include_str!("../../../systemd/llmd.toml");
    let settings = Config::from_toml(example).unwrap().resolve(&Origins::new(), &around()).unwrap();
    // Keys that are commented out are read too: uncommented one by one, each must be known and its value allowed.
    for (key, written) in Config::from_toml(example).unwrap().written() {
        if written.is_some() {
            continue;
        }
        let line = example
            .lines()
            .find_map(|line| line.strip_prefix("# ").filter(|l| l.starts_with(&format!("{key} = "))))
            .unwrap_or_else(|| panic!("systemd/llmd.toml does not name {key}"));
        with(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    // What the example shows as a default is the default.
    let defaults = with("").unwrap();
    assert_eq!(settings.sequences_max, defaults.sequences_max);
}

#[test]
fn what_is_allowed_is_what_the_scheduler_takes() {
    for rows in 1..=*SEQUENCES.end() as usize {
        assert_eq!(tokens_per_step_least(rows), crate::scheduler::tokens_per_step_least(rows), "{rows}");
    }
}

#[test]
fn the_command_line_is_well_formed() {
    CommandLine::command().debug_assert();
    for (key, _) in Config::default().written() {
        let command = CommandLine::command();
        let argument = command.get_arguments().find(|a| a.get_id() == key).expect(key);
        assert_eq!(argument.get_long(), Some(key.replace('_', "-").as_str()));
        assert_eq!(argument.get_env().and_then(|e| e.to_str()), Some(format!("LLMD_{}", key.to_uppercase()).as_str()));
        assert!(argument.get_help().is_some(), "{key} is not documented");
    }
}

proptest! {
    /// What --print-config prints means the same again.
    #[test]
    fn printed_settings_mean_the_same(
        sequences in 1u64..=4096, extra in 0u64..100, blocks in proptest::option::of(1u64..=268435455),
        metrics in prop_oneof![Just("off"), Just("127.0.0.1:9"), Just("[::1]:9400"), Just("unix:/tmp/a b\"c")],
        level in 0usize..6, step_log in proptest::option::of("[ -~]{1,30}"), cache in any::<bool>(), lock in any::<bool>(),
    ) {
        let written = |text: String| Some(Written(text));
        let config = Config {
            model: Some("/models/ü \"x\".gguf".into()),
            sequences_max: written(sequences.to_string()),
            tokens_per_step: written((tokens_per_step_least(sequences as usize) as u64 + extra).to_string()),
            kv_blocks: blocks.and_then(|b| written(b.to_string())),
            metrics: Some(metrics.into()),
            log_level: Some(LEVELS[level].0.into()),
            prefix_cache: written(cache.to_string()),
            lock_memory: written(lock.to_string()),
            step_log: step_log.and_then(written),
            ..Config::default()
        };
        let settings = config.resolve(&Origins::new(), &around()).unwrap();
        let printed = settings.to_toml();
        let again = Config::from_toml(&printed).map_err(TestCaseError::fail)?.resolve(&Origins::new(), &around()).unwrap();
        prop_assert_eq!(again, settings);
    }
}
