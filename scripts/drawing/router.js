// Replaces react-router-dom-v5-compat, which @grafana/scenes imports, by version 6 of the router.
export * from 'react-router-dom';
export const CompatRouter = ({ children }) => children;
export const CompatRoute = () => null;
