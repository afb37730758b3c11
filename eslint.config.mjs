// How the page's JavaScript is to read. Names and types are tsc's part (tsconfig.json), the format is prettier's.
const readable = {
  "array-callback-return": "error",
  "consistent-return": "off", // a handler may return early with nothing
  curly: ["error", "multi-line", "consistent"],
  "default-case-last": "error",
  eqeqeq: ["error", "always", { null: "ignore" }],
  "max-depth": ["error", 4],
  "no-else-return": "error",
  "no-implicit-coercion": ["error", { boolean: false }],
  "no-multi-assign": "error",
  "no-nested-ternary": "error",
  "no-sequences": ["error", { allowInParentheses: false }],
  "no-shadow": "error",
  "no-unneeded-ternary": "error",
  "no-unused-expressions": "error",
  "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
  "no-useless-return": "error",
  "no-var": "error",
  "object-shorthand": "error",
  "one-var": ["error", "never"],
  "prefer-const": "error",
  "prefer-template": "off",
};

export default [
  { ignores: ["**/node_modules/", "**/.venv/", "build/", "dist/"] },
  {
    files: ["cbviz/app/**/*.js", "tests/**/*.mjs"],
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: { ...readable },
  },
];
