//! SQL over the calls of a folder, Parquet and journal together. DataFusion plans and runs a query; the calls come from
//! [`Reader`](super::Reader) alone, which puts together what the files have in parts, and every call once.
//!
//! Invariants:
//! - Nothing is written: only queries are run. Files besides the folder's cannot be named.
//! - Memory is bounded, whatever the folder's size: what DataFusion keeps by its pool, what is on its way by the size of a
//!   batch. Calls come in one stream in the reader's order, so that a query gives the same each time, sums of floats too.
//! - What the reader left out is told ([`Sql::left_out`]).

mod bridge;
mod calls;
mod pushdown;

use std::path::Path;
use std::sync::Arc;

use datafusion::error::DataFusionError;
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SQLOptions, SessionConfig, SessionContext};
use datafusion::sql::parser::Statement;
use datafusion::sql::sqlparser::ast;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::ParserError;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use super::error::CaptureError;
use super::place::Place;
use super::reader::{Query, Reader};

pub use datafusion::arrow;
pub use datafusion::execution::SendableRecordBatchStream;

/// Rows that DataFusion hands on at a time: with bodies a row can be tens of MB, and a column holds 2 GiB at most.
const BATCH_ROWS: usize = 128;
/// Words and signs in one chain: an operator's operands are planned within each other, on the stack, and in a time that
/// grows with the square of their number.
const MAX_CHAIN: usize = 1000;

/// What can go wrong with a query.
#[derive(Debug, thiserror::Error)]
pub enum SqlError {
    /// It cannot be understood, or does not fit the table.
    #[error("{0}")]
    Query(String),
    /// It would change something.
    #[error(
        "captures are only read: write a query (SELECT, WITH, VALUES, DESCRIBE, SHOW TABLES or EXPLAIN), not {0}"
    )]
    NotAQuery(String),
    /// It needs more memory than it was given.
    #[error("{0}")]
    Memory(String),
    /// It failed on the way.
    #[error("{0}")]
    Failed(String),
    /// The folder cannot be read.
    #[error(transparent)]
    Capture(#[from] CaptureError),
}

/// Captures that can be asked.
pub struct Sql {
    context: SessionContext,
    left_out: Arc<calls::LeftOut>,
}

impl Sql {
    /// Opens a folder. A query keeps `memory_bytes` at most; what is more goes into files in `spill`, if given.
    ///
    /// # Errors
    /// The folder is missing or cannot be listed, or files cannot be made in `spill`.
    pub fn open(dir: impl Into<Place>, memory_bytes: usize, spill: Option<&Path>) -> Result<Self, SqlError> {
        let dir = &dir.into();
        Reader::open(dir, Query::default())?;
        let left_out = Arc::default();
        let files = spill
            .map_or(DiskManagerMode::Disabled, |spill| DiskManagerMode::Directories(vec![spill.to_owned()]));
        let runtime = RuntimeEnvBuilder::new()
            .with_memory_pool(Arc::new(FairSpillPool::new(memory_bytes)))
            .with_disk_manager_builder(DiskManagerBuilder::default().with_mode(files))
            .build_arc()
            .map_err(|error| failure(&error))?;
        let config = SessionConfig::new()
            .with_target_partitions(1)
            .with_batch_size(BATCH_ROWS)
            .with_information_schema(true);
        let context = SessionContext::new_with_config_rt(config, runtime);
        let calls = calls::Calls::new(dir, Arc::clone(&left_out)).map_err(|error| failure(&error))?;
        context.register_table("calls", Arc::new(calls)).map_err(|error| failure(&error))?;
        Ok(Self { context, left_out })
    }

    /// The rows that answer a query, as they are found. Errors on the way are for [`failure`].
    ///
    /// # Errors
    /// [`SqlError::Query`], [`SqlError::NotAQuery`]; others if it fails before the first row.
    pub async fn ask(&self, query: &str) -> Result<SendableRecordBatchStream, SqlError> {
        let wrong = |error: DataFusionError| SqlError::Query(text(&error));
        let chain = longest_chain(query);
        if chain > MAX_CHAIN {
            let remedy = "write many alternatives as IN (…), and many texts as a list";
            let problem =
                format!("a chain of {chain} words and signs, at most {MAX_CHAIN} are understood: {remedy}");
            return Err(SqlError::Query(problem));
        }
        let state = self.context.state();
        let statement =
            state.sql_to_statement(query, &state.config().options().sql_parser.dialect).map_err(wrong)?;
        if !is_query(&statement) {
            let words: Vec<_> = query.split_whitespace().take(2).collect();
            return Err(SqlError::NotAQuery(words.join(" ")));
        }
        let plan = state.statement_to_plan(statement).await.map_err(wrong)?;
        let only_queries =
            SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
        only_queries.verify_plan(&plan).map_err(|error| SqlError::NotAQuery(text(&error)))?;
        let rows = self.context.execute_logical_plan(plan).await.map_err(wrong)?;
        rows.execute_stream().await.map_err(|error| match failure(&error) {
            SqlError::Failed(problem) => SqlError::Query(problem),
            other => other,
        })
    }

    /// What calls may be missing in what was answered so far, in words.
    #[must_use]
    pub fn left_out(&self) -> Vec<String> {
        self.left_out.all()
    }
}

/// Words and signs from the last comma on, with those around the parentheses: no expression is nested deeper.
fn longest_chain(query: &str) -> usize {
    let tokens = Tokenizer::new(&GenericDialect {}, query).tokenize().unwrap_or_default();
    let (mut around, mut here, mut longest) = (vec![], 0, 0);
    for token in tokens {
        match token {
            Token::Whitespace(_) | Token::Number(..) | Token::SingleQuotedString(_) => {}
            Token::LParen | Token::LBracket => around.push(here),
            Token::RParen | Token::RBracket => here = around.pop().unwrap_or(0) + 1,
            Token::Comma => here = around.last().copied().unwrap_or(0),
            _ => here += 1,
        }
        longest = longest.max(here);
    }
    longest
}

/// Whether it only asks.
fn is_query(statement: &Statement) -> bool {
    match statement {
        Statement::Statement(statement) => matches!(
            **statement,
            ast::Statement::Query(_)
                | ast::Statement::ExplainTable { .. }
                | ast::Statement::ShowTables { .. }
                | ast::Statement::ShowColumns { .. }
                | ast::Statement::ShowFunctions { .. }
        ),
        Statement::Explain(explain) => is_query(&explain.statement),
        _ => false,
    }
}

/// What an error on the way means.
#[must_use]
pub fn failure(error: &DataFusionError) -> SqlError {
    match error.find_root() {
        DataFusionError::ResourcesExhausted(problem) => SqlError::Memory(problem.clone()),
        _ => SqlError::Failed(text(error)),
    }
}

/// What is wrong, without what kind of error DataFusion takes it for.
fn text(error: &DataFusionError) -> String {
    match error.find_root() {
        DataFusionError::External(error) => error.to_string(),
        DataFusionError::SQL(error, _) => match &**error {
            ParserError::TokenizerError(problem) | ParserError::ParserError(problem) => problem.clone(),
            ParserError::RecursionLimitExceeded => {
                "too many parentheses or queries within each other".to_owned()
            }
        },
        root => root.message().into_owned(),
    }
}
