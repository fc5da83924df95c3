//! `consort serve`: serves a model over HTTP.

pub mod admin;
pub mod capacity;
mod greeting;
pub mod http;
mod key_reload;
mod load;
pub mod logs;
mod preflight;
pub mod shutdown;

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use server::{App, Config, ConnectionLimits, DescriptorLimit, Listener, Tls};
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use crate::listening;
use crate::model_config::ModelConfig;
use crate::options::{ModelName, ModelOptions, ThreadOption, cpus};
use crate::running_servers;
use crate::store::DEFAULT_REPO;
use greeting::Greeting;
use http::HttpOptions;
use load::CacheOptions;
use shutdown::Signals;

/// Threads of the HTTP server. The model has compute threads of its own.
const HTTP_THREADS: usize = 2;
/// The most threads that parse bodies, render prompts and compile grammars, however many CPUs there are: each may use
/// hundreds of megabytes for a hostile body.
const PROMPT_THREADS_MAX: usize = 8;

/// Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs, metrics, and a chat page
///
/// The server listens at once; `/ready` tells when the model is loaded. Ctrl-C lets running requests finish, a second one
/// ends at once.
#[derive(Args, Debug)]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelName,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    cache: CacheOptions,
    #[command(flatten)]
    options: ModelOptions,
    #[command(flatten)]
    http: HttpOptions,
}

impl ServeArgs {
    pub fn run(self) -> Result<ExitCode> {
        let model = ModelConfig::new(&self.options)?;
        self.cache.check(&model.placement)?;
        logs::install_for_server(self.http.log, self.http.verbose)?;
        if let Some(model) = self.model.get() {
            preflight::check_model(model)?;
        }
        let app = App::new(self.config()?);
        let tls = self.http.tls()?;
        let admin = self.http.admin.clone();
        let admin_connections = if admin.is_some() { admin::ADMIN_CONNECTIONS_MAX } else { 0 };
        let limit = DescriptorLimit::raise(model.placement.ranks(), admin_connections);
        if let Some(at) = admin {
            admin::start(&app, at, tls.clone())?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(HTTP_THREADS)
            .max_blocking_threads(cpus().clamp(2, PROMPT_THREADS_MAX))
            .thread_name("http")
            .enable_all()
            .build()
            .context("start the threads of the server")?;
        let result = runtime.block_on(self.serve(model, app, tls, limit));
        // Does not wait for a model that is still loading.
        runtime.shutdown_background();
        result
    }

    async fn serve(
        self,
        model: ModelConfig,
        app: Arc<App>,
        tls: Option<Tls>,
        limit: DescriptorLimit,
    ) -> Result<ExitCode> {
        let grace = Duration::from_secs(self.http.grace);
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut signals = Signals::listen()?;
        let listener = Listener::bind(&self.http.host, self.http.port, tls).await;
        let listener = listener.map_err(|error| listening::explain(error.address(), "--port", error.io()))?;
        let listener =
            listener.with_limits(ConnectionLimits::new(limit.connections)).with_metrics(app.connection_metrics());
        let address = listener.address().context("find out the address")?;
        let url = format!("{scheme}://{address}");
        let (connections, open_files) = (limit.connections, limit.descriptors);
        let registration = running_servers::register(&greeting::local_url(scheme, address));
        let _registration = registration
            .inspect_err(|error| debug!("`consort ps` and `consort stop` do not find this server: {error:#}"));
        if logs::has_person() {
            let (has_keys, models) = (!app.config().keys.is_empty(), vec![app.config().model.clone()]);
            Greeting::new(scheme, address, has_keys, models).print();
        } else {
            info!(model = app.config().model, connections, open_files, "listening on {url}");
            if let Some(warning) = open_warning(&app, address) {
                warn!("{warning}");
            }
        }
        key_reload::spawn(Arc::clone(&app), self.http.keys.clone())?;

        let (failed, failure) = oneshot::channel();
        load::spawn_loader(self, model, Arc::clone(&app), url, failed)?;
        shutdown::run(listener, &app, &mut signals, failure, grace).await
    }

    fn config(&self) -> Result<Config> {
        let given = self.model.get().unwrap_or(DEFAULT_REPO);
        let own = short_name(given);
        let mut names = self.http.names.iter().cloned();
        let mut config = Config::new(names.next().unwrap_or_else(|| own.clone()));
        config.aliases = names.chain((own != given && self.http.names.is_empty()).then(|| given.to_owned())).collect();
        config.keys = self.http.keys.keys()?;
        config.allowed_hosts = self.http.allowed_hosts();
        config.body_bytes_max = self.http.max_body;
        config.trim_memory = kernels::cpu::trim_allocator;
        config.origins = self.http.cors.clone();
        config.stores_responses = !self.http.no_store;
        Ok(config)
    }
}

/// The warning of a server that other machines can use without a key.
fn open_warning(app: &App, address: SocketAddr) -> Option<String> {
    let is_open = !address.ip().is_loopback() && app.config().keys.is_empty();
    is_open.then(|| {
        format!(
            "everybody who can reach {address} can use the model: use --api-key or --api-key-file. Clients that call this \
             machine by a name need --allowed-host NAME"
        )
    })
}

/// The name of a model that is a local file or folder. Clients do not see its path.
pub fn short_name(given: &str) -> String {
    let path = Path::new(given);
    let Ok(real) = path.canonicalize() else { return given.to_owned() };
    // A path such as `.` has no name. A link has one, which tells more than what it points to.
    let name = path.file_name().or(real.file_name()).and_then(|name| name.to_str()).unwrap_or(given);
    name.strip_suffix(".gguf").unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use server::ApiKeys;

    #[test]
    fn a_server_that_others_reach_without_a_key_warns() {
        let open = App::new(Config::new("m"));
        let guarded = App::new(Config { keys: ApiKeys::new(["key"]).unwrap(), ..Config::new("m") });
        for (address, warns) in
            [("127.0.0.1:80", false), ("[::1]:80", false), ("0.0.0.0:80", true), ("10.0.0.1:80", true)]
        {
            let address = address.parse().unwrap();
            assert_eq!(open_warning(&open, address).is_some(), warns, "{address}");
            assert!(open_warning(&guarded, address).is_none(), "{address}");
        }
    }

    #[test]
    fn a_model_on_disk_is_called_by_its_last_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny-q8_0.gguf");
        std::fs::write(&file, "").unwrap();
        assert_eq!(short_name(file.to_str().unwrap()), "tiny-q8_0");
        let own = folder.path().canonicalize().unwrap();
        let own = own.file_name().unwrap().to_str().unwrap();
        std::fs::create_dir(folder.path().join("within")).unwrap();
        for path in [".", "within/.."].map(|path| folder.path().join(path)) {
            assert_eq!(short_name(path.to_str().unwrap()), own);
        }
        assert_eq!(short_name("."), "consort");
        assert_eq!(short_name("owner/name:Q4_K_M"), "owner/name:Q4_K_M");
    }
}
