//! `consort serve`: serves one model or several over HTTP.

pub mod admin;
pub mod capacity;
mod greeting;
pub mod http;
mod key_reload;
mod library;
mod load;
pub mod logs;
mod preflight;
pub mod shutdown;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use server::{App, Config, ConnectionLimits, DescriptorLimit, LibraryOptions, Listener, ModelLibrary, Tls};
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use crate::listening;
use crate::model_config::ModelConfig;
use crate::options::{ModelOption, ModelOptions, ThreadOption, bytes, cpus, duration, heading};
use crate::running_servers;
use crate::store::Store;
use crate::usage::UsageError;
use greeting::Greeting;
use http::HttpOptions;
use library::StoreLibrary;
use load::{CacheOptions, ModelLoader};
use shutdown::Signals;

/// Threads of the HTTP server. The model has compute threads of its own.
const HTTP_THREADS: usize = 2;
/// The most threads that parse bodies and render prompts, however many CPUs there are: each may use
/// hundreds of megabytes for a hostile body.
const PROMPT_THREADS_MAX: usize = 8;

/// Serve models over HTTP: OpenAI's, Anthropic's and Ollama's APIs, metrics, and a chat page
///
/// Without a model, all that are on this machine are offered, and loaded when a request names them. The server listens at
/// once; `/ready` tells when it can answer. Ctrl-C lets running requests finish, a second one ends at once.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Models: names, folders or .gguf files [default: all that are here]
    #[arg(value_name = "MODEL", conflicts_with = "model_option")]
    models: Vec<String>,
    #[command(flatten)]
    model: ModelOption,
    #[command(flatten)]
    library: LibraryArgs,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    cache: CacheOptions,
    #[command(flatten)]
    options: ModelOptions,
    #[command(flatten)]
    http: HttpOptions,
}

/// Several models behind one server.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::MODEL)]
struct LibraryArgs {
    /// Memory for all models together, such as 12G [default: what is free]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory: Option<u64>,
    /// Unload a model that had no request for so long, such as 5m [default: when another one needs its memory]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    keep: Option<Duration>,
    /// Never unload this model; may be repeated
    #[arg(long, value_name = "MODEL")]
    pin: Vec<String>,
    /// Refuse requests that name another model. Without this, a server of one model answers whatever the name
    #[arg(long)]
    strict_model: bool,
}

/// What a server offers.
enum Offer {
    /// One model, which is loaded at once.
    One(String),
    /// Those that are loaded when they are asked for.
    Library(Arc<StoreLibrary>),
}

impl ServeArgs {
    pub fn run(self) -> Result<ExitCode> {
        let config = ModelConfig::new(&self.options)?;
        self.cache.check(&config.placement)?;
        logs::install_for_server(self.http.log, self.http.verbose)?;
        for model in self.named() {
            preflight::check_model(model)?;
        }
        let ranks = config.placement.ranks();
        let loader = ModelLoader { config, threads: self.threads.clone(), cache: self.cache.clone() };
        let offer = self.offer(&loader)?;
        let app = self.app(&offer)?;
        let tls = self.http.tls()?;
        let admin = self.http.admin.clone();
        let admin_connections = if admin.is_some() { admin::ADMIN_CONNECTIONS_MAX } else { 0 };
        let limit = DescriptorLimit::raise(ranks, admin_connections);
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
        let result = runtime.block_on(self.serve(loader, offer, app, tls, limit));
        // Does not wait for a model that is still loading.
        runtime.shutdown_background();
        result
    }

    async fn serve(
        self,
        loader: ModelLoader,
        offer: Offer,
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
        let names = match &offer {
            Offer::One(_) => vec![app.config().model.clone()],
            Offer::Library(library) => library.names(),
        };
        if logs::has_person() {
            let has_keys = !app.config().keys.is_empty();
            Greeting::new(scheme, address, has_keys, names).print();
        } else {
            info!(connections, open_files, "listening on {url}");
            info!("models: {}", names.join(", "));
            if let Some(warning) = open_warning(&app, address) {
                warn!("{warning}");
            }
        }
        key_reload::spawn(Arc::clone(&app), self.http.keys.clone())?;

        let (failed, failure) = oneshot::channel();
        match offer {
            Offer::One(model) => load::spawn_loader(loader, model, &app, url, failed)?,
            Offer::Library(library) => {
                tokio::spawn(Arc::clone(app.models()).unload_idle());
                // Of all that are here, nobody has said which one is wanted.
                let first = self.named().first().cloned().or_else(|| library.only());
                tokio::spawn(preload(Arc::clone(&app), self.library.pin.iter().cloned().chain(first).collect()));
            }
        }
        shutdown::run(listener, &app, &mut signals, failure, grace).await
    }

    /// The models that were named.
    fn named(&self) -> &[String] {
        match &self.model.model_option {
            Some(model) => std::slice::from_ref(model),
            None => &self.models,
        }
    }

    /// One model if one is named, else the library. If there is no model yet, the default one is fetched first.
    fn offer(&self, loader: &ModelLoader) -> Result<Offer> {
        if let [model] = self.named() {
            let LibraryArgs { memory, keep, pin, .. } = &self.library;
            let is_single = memory.is_none() && keep.is_none() && pin.is_empty();
            ensure!(is_single, UsageError::new("--memory, --keep and --pin go with several models"));
            return Ok(Offer::One(model.clone()));
        }
        let (memory, strict) = (self.library.memory, self.library.strict_model);
        let library = StoreLibrary::new(loader.clone(), self.named(), memory, strict)?;
        Ok(match library.names().is_empty() {
            true => Offer::One(loader.config.resolve(None)?.name),
            false => Offer::Library(Arc::new(library)),
        })
    }

    fn app(&self, offer: &Offer) -> Result<Arc<App>> {
        let mut config = Config::new("");
        config.keys = self.http.keys.keys()?;
        config.allowed_hosts = self.http.allowed_hosts().into_iter().chain(own_names()).collect();
        config.body_bytes_max = self.http.max_body;
        config.trim_memory = kernels::cpu::trim_allocator;
        config.origins = self.http.cors.clone();
        config.stores_responses = !self.http.no_store;
        config.strict_names = self.library.strict_model;
        match offer {
            Offer::One(given) => {
                let own = Store::from_environment()?.canonical(given).unwrap_or_else(|| given.clone());
                let mut names = self.http.names.iter().cloned();
                config.model = names.next().unwrap_or_else(|| own.clone());
                let is_other = own != *given && self.http.names.is_empty();
                config.aliases = names.chain(is_other.then(|| given.clone())).collect();
                Ok(App::new(config))
            }
            Offer::Library(library) => {
                let names = &self.http.names;
                ensure!(names.is_empty(), UsageError::new("--served-model-name goes with one model"));
                let pinned = self.library.pin.iter().map(|name| {
                    let known = library.resolve(name);
                    known.ok_or_else(|| UsageError::new(format!("--pin {name}: this server does not offer it")))
                });
                let options = LibraryOptions {
                    keep: self.library.keep,
                    pinned: pinned.collect::<Result<_, _>>()?,
                    default: self.models.first().and_then(|first| library.resolve(first)),
                };
                Ok(App::with_library(config, Arc::clone(library) as Arc<dyn ModelLibrary>, options))
            }
        }
    }
}

/// The names by which machines of this network call this one.
fn own_names() -> Vec<String> {
    #[cfg(unix)]
    {
        let system = rustix::system::uname();
        let host = system.nodename().to_string_lossy();
        let name = host.split('.').next().unwrap_or_default();
        if !name.is_empty() {
            return vec![host.to_string(), name.to_owned(), format!("{name}.local")];
        }
    }
    Vec::new()
}

/// Loads models before they are asked for.
async fn preload(app: Arc<App>, names: Vec<String>) {
    for name in names {
        if let Err(error) = app.model(Some(&name)).await {
            warn!("{error}");
        }
    }
}

/// The warning of a server that other machines can use without a key.
fn open_warning(app: &App, address: SocketAddr) -> Option<String> {
    let is_open = !address.ip().is_loopback() && app.config().keys.is_empty();
    is_open.then(|| {
        format!(
            "everybody who can reach {address} can use the model: use --api-key or --api-key-file. Clients that call this \
             machine by another name than its own need --allowed-host NAME"
        )
    })
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
}
